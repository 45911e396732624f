"""The Python environments of the hosts: what each one contains (`resolve`), who builds it (`plan`), what is sent (`bundle`)."""
