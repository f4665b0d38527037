"""Whether a node is fit for the proxy: judgements on facts that they are given, each with what to do about it."""
