"""Several workers: collectives, the data service, and the status of a run."""
