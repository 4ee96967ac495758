"""Which rank the others wait for: own step times, arrivals at collectives, the decision, the report."""
