"""The commands: one table with the name, options, function and help of each.

The program `trainyard`, the action plugin of the playbooks, the documentation and the completion of shells read it.
"""
