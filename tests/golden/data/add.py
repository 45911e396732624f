print("a script of every rank")
