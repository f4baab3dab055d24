"""The names, arguments and in-place contracts that serving engines call, as thin layers over the operators.

One package or module a peer, imported by its full name: nothing here is loaded until it is asked for.
"""
