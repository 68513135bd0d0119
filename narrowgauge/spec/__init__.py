"""The vocabulary that both sides share: formats, recipes, dialects, results, training recipes. No arithmetic."""
