"""Signed experts: keys, signatures, trusted signers and revocations. The cryptography is that of model-signing."""
