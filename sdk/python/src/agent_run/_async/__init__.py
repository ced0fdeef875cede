"""The SDK for asyncio."""
