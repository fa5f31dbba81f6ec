"""init: files of rows -> a recipe for them."""
