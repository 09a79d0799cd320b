"""Parts that stand in the user's model: hooks, handles, and how they reach the tiers."""
