"""What a node tells of itself: the event log, TensorBoard, Weights & Biases, Prometheus."""
