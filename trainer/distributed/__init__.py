"""Process groups, replicas and the distribution of rows over ranks."""
