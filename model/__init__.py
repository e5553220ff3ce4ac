"""The transformer: configuration, weights, layers, sampling."""
