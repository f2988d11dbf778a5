"""Looking at machines and at runs: topology, links, and what ranks recorded. Nothing here takes part in training."""
