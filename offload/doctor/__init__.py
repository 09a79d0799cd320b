"""Findings on what of a machine helps or hinders the engine, and commands that repair it. Asks what the engine itself
asks."""

from offload.doctor.examination import Section, examine
from offload.doctor.finding import Finding, Status

__all__ = ["Finding", "Section", "Status", "examine"]
