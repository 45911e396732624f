"""The dashboard: a web page on the controller that shows hosts, runs and events while they happen."""
