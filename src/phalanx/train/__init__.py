"""Training a model from a configuration: the layer between the three nouns and a person's command line."""
