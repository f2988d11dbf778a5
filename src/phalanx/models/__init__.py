"""Plain PyTorch models. Nothing here knows that more than one device exists."""
