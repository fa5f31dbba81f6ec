"""recmill: from raw click logs to a served recommender."""

__version__ = "0.1.0"
