# The lab: real hosts on this machine, to try the cluster on (docs/lab.md). Needs root on Debian or Ubuntu.
VENV ?= .venv
N ?= 3
LAB = PYTHONPATH=molecule/resources $(VENV)/bin/python -m testbed

.PHONY: lab lab-down lab-clean lab-status lab-ssh lab-reboot lab-fault lab-undo lab-faults

lab: $(READY)
	@$(LAB) up --hosts $(N) --venv $(VENV) --inventory inventory/lab.yml
	@echo "next: ansible-playbook -i inventory/lab.yml site.yml    (make lab-down ends it)"

lab-down:
	@$(LAB) down --inventory inventory/lab.yml

# Also what the next lab would use again: root file systems and images.
lab-clean:
	@$(LAB) down --all --inventory inventory/lab.yml
	@$(LAB) forget

lab-ssh:
	@$(LAB) ssh $(HOST)

lab-reboot:
	@$(LAB) reboot $(HOST)

lab-status:
	@$(LAB) status

lab-faults:
	@$(LAB) faults

# make lab-fault HOST=node2 FAULT='shape 100mbit'
lab-fault:
	@$(LAB) fault $(HOST) $(FAULT)

# make lab-undo HOST=node2 [FAULT=shape]
lab-undo:
	@$(LAB) undo $(HOST) $(FAULT)
