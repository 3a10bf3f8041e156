"""``python -m weight_sync.bench``: what every transport costs here, beside what this machine could do at best."""
