"""The engine inside of other libraries' trainers, a module each. Nothing is imported before it is asked for."""
