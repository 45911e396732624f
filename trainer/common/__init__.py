"""Errors, formats, files and paths that every other package uses. No torch."""
