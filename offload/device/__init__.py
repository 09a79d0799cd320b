"""What the engine asks of a device, and CUDA."""
