"""Power of a user's own test: which known wrong results does it accept?"""
