"""Reporting of a node: the event log, TensorBoard, Weights & Biases, Prometheus."""
