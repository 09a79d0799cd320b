"""Speed of the drives under a path, with the settings that give most, and against fio. Writes the profile that engines
load."""
