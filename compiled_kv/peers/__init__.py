"""Operators that only a peer's contract asks for; `integrations` has them under the peers' own names."""
