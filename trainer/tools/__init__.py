"""The run spec as a configuration file of another tool, or as a script."""
