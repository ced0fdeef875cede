package microvm

import "context"

// Claim lets a paused fork go on as a different sandbox.
func (s *sandbox) Claim(ctx context.Context, hostname string) error {
	s.capture.Lock() // a snapshot contains the identity, so no capture may run meanwhile
	defer s.capture.Unlock()
	return s.self.Claim(ctx, s.Agent(), hostname, func() (func(context.Context) error, error) {
		if s.Unpark() { // the renewal request itself wakes it
			return func(context.Context) error { return nil }, nil
		}
		resumed, err := s.PostResume()
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			_, err := resumed(ctx)
			return err
		}, nil
	})
}
