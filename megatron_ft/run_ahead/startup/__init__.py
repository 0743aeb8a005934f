"""Directory for PYTHONPATH: Python imports ``sitecustomize`` from it before it runs a script."""
