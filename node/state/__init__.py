"""The state and the chain of certificates: held, on disk, fetched from others and served to them."""
