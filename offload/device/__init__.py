"""Protocol of a device, and CUDA."""
