from lab_hosts import bare, hosts, lab, metal, provisioned  # noqa: F401  fixtures
