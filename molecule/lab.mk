# The lab: hosts on this machine to try the cluster on (CONTRIBUTING.md). Requires root on Debian or Ubuntu.
# N: number of hosts. RELEASE: code names that the hosts use in rotation. LAB_NAME: several labs can run side by side.
VENV ?= .venv
N ?= 3
RELEASE ?=
LAB_NAME ?= lab
# The inventory of each lab: inventory/lab.yml, or inventory/lab-NAME.yml with another LAB_NAME.
LAB_FILE ?= inventory/$(if $(filter lab,$(LAB_NAME)),lab,lab-$(LAB_NAME)).yml
LAB = PYTHONPATH=molecule/resources $(VENV)/bin/python -m testbed --name '$(LAB_NAME)'

.PHONY: lab lab-down lab-clean lab-status lab-ssh lab-reboot lab-fault lab-undo lab-faults

lab: $(READY)
	@$(LAB) up --hosts $(N) --release '$(RELEASE)' --venv $(VENV) --inventory $(LAB_FILE)
	@echo "next: ansible-playbook -i $(LAB_FILE) site.yml    (make lab-down$(if $(filter lab,$(LAB_NAME)),, LAB_NAME=$(LAB_NAME)) stops the lab)"

lab-down:
	@$(LAB) down --inventory $(LAB_FILE)

# Remove all labs and the cached root file systems and disk images.
lab-clean:
	@$(LAB) down --all
	@rm -f inventory/lab.yml inventory/lab-*.yml
	@$(LAB) clean

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
