"""Turn configuration files of other tools into a run spec whose comments account for every name of the files."""
