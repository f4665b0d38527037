"""Resolve Services and EndpointSlices to service ports and their endpoints, with a reason for each skipped one.

Pure: no clock, no environment, no logging.
"""
