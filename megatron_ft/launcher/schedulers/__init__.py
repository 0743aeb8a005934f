"""Schedulers: each is one file with ``detect()``, its facts, and ``requeue()``; `schedulers.schedulers` lists them."""
