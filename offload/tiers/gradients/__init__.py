"""Gradients on their way from backward to their homes."""
