// Empty: lets the Go files declare a function whose body is elsewhere.
