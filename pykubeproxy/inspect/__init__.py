"""Views on rules: what the tables mean, in the terms people think in. Pure: values in, views and text out."""
