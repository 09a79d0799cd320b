"""How fast the drives under a path are, with which settings, and against fio. Writes the profile that engines load."""
