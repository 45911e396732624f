from lab_hosts import bare, hosts, lab, metal  # noqa: F401  fixtures
