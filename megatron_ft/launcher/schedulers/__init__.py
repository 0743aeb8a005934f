"""Schedulers: each is one file with ``detect()``, its facts, ``rank_variable()`` and ``requeue()``."""
