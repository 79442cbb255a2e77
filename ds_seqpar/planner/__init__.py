"""Choose "auto" settings and estimate the cost of a step. The package is imported only when needed."""
