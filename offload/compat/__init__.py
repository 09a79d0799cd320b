"""Other libraries' front doors, standing on the engine's public names."""
