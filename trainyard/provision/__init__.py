"""Logic of the roles of site.yml that runs on the controller: addresses, firewall rules, values in configuration files."""
