"""Resolve Services and EndpointSlices to service ports and their endpoints, with a reason for each one skipped.

Pure: no clock, no environment, no logging.
"""
