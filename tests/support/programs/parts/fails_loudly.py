print("begins to fail")
raise RuntimeError("not today")
