"""The strategy without a common state: partners exchange their models and average."""
