"""The version. The build reads it here: the sources know it, installed or not."""

VERSION = "0.1.0"
