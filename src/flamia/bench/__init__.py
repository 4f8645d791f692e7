"""Speed, measured against others on the same card in the same minute: `python -m flamia.bench.run --help`."""
