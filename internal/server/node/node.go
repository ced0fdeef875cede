// Package node serves the gRPC API of a node: api/node/v1 over any server.Service.
package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// Bounds of a gRPC connection and its calls. Messages, headers and times have
// the bounds of REST.
const (
	maxStreams       = 1024
	maxLarge         = 8 * server.MaxBody
	keepaliveTime    = time.Minute
	keepaliveTimeout = 20 * time.Second
	minPing          = 10 * time.Second
)

// grpcCodes has the gRPC code of each code.
var grpcCodes = map[sandbox.Code]codes.Code{
	sandbox.CodeInvalid:        codes.InvalidArgument,
	access.CodeUnauthenticated: codes.Unauthenticated,
	sandbox.CodeDenied:         codes.PermissionDenied,
	sandbox.CodeNotFound:       codes.NotFound,
	sandbox.CodeExists:         codes.AlreadyExists,
	sandbox.CodeConflict:       codes.FailedPrecondition,
	sandbox.CodeEnded:          codes.NotFound,
	sandbox.CodeTooOld:         codes.OutOfRange,
	sandbox.CodeOtherState:     codes.FailedPrecondition,
	sandbox.CodeCordoned:       codes.Unavailable,
	server.CodeTooLarge:        codes.ResourceExhausted,
	sandbox.CodeCapacity:       codes.ResourceExhausted,
	server.CodeExhausted:       codes.ResourceExhausted,
	sandbox.CodeNotReady:       codes.Unavailable,
	sandbox.CodeClosing:        codes.Unavailable,
	server.CodeUnavailable:     codes.Unavailable,
	server.CodeAudit:           codes.Unavailable,
	server.CodeTimeout:         codes.DeadlineExceeded,
	sandbox.CodeUnimplemented:  codes.Unimplemented,
	sandbox.CodeInternal:       codes.Internal,
}

// grpcStatus makes the gRPC status of an error, with the details that REST has.
func grpcStatus(err error) *status.Status {
	e := server.ToError(err)
	code, known := grpcCodes[e.Code]
	if !known { // errors of files, programs and HTTP do not occur here
		code = codes.Internal
	}
	if errors.Is(err, context.Canceled) {
		code = codes.Canceled
	}
	st := status.New(code, e.Message)
	with, err := st.WithDetails(nodeconv.FromError(e))
	if err != nil {
		return st // it is not an error
	}
	return with
}

// Server is the gRPC server of a node.
type Server struct {
	*grpc.Server
	endWatches context.CancelFunc
	entrance   *entrance // nil on a Unix socket
}

// Serve serves connections of a listener.
func (s *Server) Serve(l net.Listener) error {
	if s.entrance != nil {
		l = s.entrance.listen(l)
	}
	return s.Server.Serve(l)
}

// Stop ends all calls and connections.
func (s *Server) Stop() {
	s.endWatches()
	if s.entrance != nil {
		s.entrance.close(true) // gRPC waits for connections that it does not serve yet
	}
	s.Server.Stop()
}

// Shutdown ends watches, and waits for other calls until ctx ends.
func (s *Server) Shutdown(ctx context.Context) {
	s.endWatches()
	if s.entrance != nil {
		s.entrance.close(false)
	}
	defer context.AfterFunc(ctx, s.Stop)()
	s.GracefulStop()
}

// New makes the gRPC server of a node, for Unix sockets. The kernel knows the user at the other
// end; API keys have no part. The caller serves with it, and ends it.
func New(cfg server.Config) *Server {
	serving, endWatches := context.WithCancel(context.Background())
	n := newAPI(cfg, serving)
	return &Server{n.server(peerCredentials{}), endWatches, nil}
}

// NewMutual makes the gRPC server of a node for TCP: clients are components of a cluster,
// known by the certificates that they show. The server follows the files of end until it
// is stopped.
func NewMutual(cfg server.Config, end *access.Mutual) *Server {
	return newMutual(cfg, end, defaultBounds)
}

func newMutual(cfg server.Config, end *access.Mutual, b bounds) *Server {
	serving, endWatches := context.WithCancel(context.Background())
	n := newAPI(cfg, serving)
	e := newEntrance(end, b, n)
	go e.follow(serving)
	return &Server{n.server(e, grpc.ConnectionTimeout(b.handshake)), endWatches, e}
}

func newAPI(cfg server.Config, serving context.Context) *nodeAPI {
	return &nodeAPI{Config: cfg.WithDefaults(), serving: serving}
}

// server makes the server of the methods.
func (n *nodeAPI) server(creds credentials.TransportCredentials, more ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append([]grpc.ServerOption{
		grpc.Creds(creds),
		grpc.MaxRecvMsgSize(maxLarge),
		grpc.MaxHeaderListSize(server.MaxHeader),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(server.ReadHeaderTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: server.IdleTimeout, Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing}),
		grpc.InTapHandle(n.begin),
		grpc.ChainUnaryInterceptor(n.unary),
		grpc.ChainStreamInterceptor(n.stream),
	}, more...)...)
	nodev1.RegisterNodeServer(s, n)
	healthv1.RegisterHealthServer(s, &health{nodeAPI: n, watches: map[string]int{}})
	return s
}

// nodeAPI implements the methods.
type nodeAPI struct {
	nodev1.UnimplementedNodeServer
	server.Config
	serving context.Context // ends with the server
	// strangers bounds the lines in the audit log of refused connections, nodes those
	// of calls that are never for nodes.
	strangers, nodes server.Throttle
	// refusals bounds the lines of each principal's refused calls.
	refusals server.Throttles
	// uses and tokens count the streams that clients hold open.
	uses, tokens seats
}

// peerCredentials finds the user at the other end of a Unix socket. It encrypts
// nothing, because no network is in between.
type peerCredentials struct{}

// peerUser is that user.
type peerUser struct {
	credentials.CommonAuthInfo
	uid uint32
}

func (peerUser) AuthType() string { return "unix" }

func (peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	uid, err := server.PeerUID(conn)
	if err != nil {
		return nil, nil, fmt.Errorf("see who connects: %w", err)
	}
	return conn, peerUser{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, uid}, nil
}

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are a server's")
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (c peerCredentials) Clone() credentials.TransportCredentials { return c }
func (peerCredentials) OverrideServerName(string) error           { return nil }

// principal finds the principal of a call. If it refuses the call, it still
// returns the principal's name, if that is known.
func (n *nodeAPI) principal(ctx context.Context) (access.Principal, error) {
	acting, err := actingOf(ctx)
	switch from := fromOf(ctx).(type) {
	case peerUser:
		if err == nil && acting != nil {
			err = sandbox.Invalid("metadata", "a call over the Unix socket names no principal: it is made by the user at its other end")
		}
		if err != nil {
			return access.Principal{}, err
		}
		return n.Authenticator.Authenticate(ctx, access.Credentials{User: &from.uid})
	case peerComponent:
		if err != nil {
			return access.Principal{Name: from.String(), Via: from.Component}, err
		}
		return n.Authenticator.Authenticate(ctx, access.Credentials{Component: &from.Component, Acting: acting})
	}
	return access.Principal{}, sandbox.Errorf(access.CodeUnauthenticated, "the call came neither over the Unix socket nor over mutual TLS")
}

func actingOf(ctx context.Context) (*access.Acting, error) {
	md, _ := metadata.FromIncomingContext(ctx) // absent if a handler was called directly
	return server.ActingOf(md)
}

// fromOf returns the other end of a call's connection.
func fromOf(ctx context.Context) credentials.AuthInfo {
	if p, ok := peer.FromContext(ctx); ok {
		return p.AuthInfo
	}
	return nil
}

// patience ends a call whose client neither sends its request nor receives its
// answers. It does not bound how long the call is served.
type patience struct {
	timer *time.Timer
	stall time.Duration
	end   context.CancelFunc // of the call
}

type patienceKey struct{}

// begin is called when a call has begun, perhaps before its request has come. It
// refuses an operation that the component may call for no principal, so that the
// request is not even read.
func (n *nodeAPI) begin(ctx context.Context, info *tap.Info) (context.Context, error) {
	if from, ok := fromOf(ctx).(peerComponent); ok {
		if o := operationOf(info.FullMethodName); !o.Rule().For(from.Component) {
			err := server.NotForRole(o, from.Role)
			who := access.Principal{Name: from.String(), Via: from.Component}
			n.auditRefused(&n.nodes, call{method: info.FullMethodName}.event(ctx, who, audit.End), err)
			return nil, grpcStatus(err).Err()
		}
	}
	ended := ctx // by gRPC, with the call
	ctx, cancel := context.WithCancel(ctx)
	p := patience{time.AfterFunc(n.BodyTimeout, cancel), n.StallTimeout, cancel}
	context.AfterFunc(ended, func() { p.timer.Stop() })
	return context.WithValue(ctx, patienceKey{}, p), nil
}

func patienceOf(ctx context.Context) patience {
	p, _ := ctx.Value(patienceKey{}).(patience) // begin has set it
	return p
}

// unary wraps every call with one answer, which gRPC sends when unary returns.
func (n *nodeAPI) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (answer any, err error) {
	p := patienceOf(ctx)
	p.timer.Stop()
	defer func() { p.timer.Reset(p.stall) }()
	err = n.serve(ctx, info.FullMethod, req, func(ctx context.Context) error {
		answer, err = handle(ctx, req)
		return err
	})
	return answer, err
}

// stream wraps every call with many answers.
func (n *nodeAPI) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	// The handler of a listed method calls serve when its request has come.
	if err := checkListed(info.FullMethod); err != nil {
		return grpcStatus(err).Err()
	}
	return handle(srv, &patientStream{ServerStream: ss, patience: patienceOf(ss.Context())})
}

// patientStream is a stream whose client has only a limited time.
type patientStream struct {
	grpc.ServerStream
	patience
	begun sync.Once
}

// RecvMsg receives the request, or the first of many. From then on the timer runs only
// while an answer is sent.
func (s *patientStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	s.begun.Do(func() { s.timer.Stop() })
	return err
}

// SendMsg sends an answer.
func (s *patientStream) SendMsg(m any) error {
	s.timer.Reset(s.stall)
	defer s.timer.Stop()
	return s.ServerStream.SendMsg(m)
}

// serve does a call: it finds the principal, checks the request, recovers from
// panics and writes the logs. Every error gets details.
func (n *nodeAPI) serve(ctx context.Context, method string, req any, do func(context.Context) error) (err error) {
	start := time.Now()
	who, err := n.principal(ctx)
	defer func() {
		if p := recover(); p != nil {
			n.Log.Error("a call has panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
			err = sandbox.Errorf(sandbox.CodeInternal, "the daemon has a defect").Try("Report it with the daemon's log")
		}
		code := codes.OK
		if err != nil {
			st := grpcStatus(err)
			if code = st.Code(); code == codes.Internal {
				n.Log.Error("a call failed", "method", method, "error", err)
			}
			err = st.Err()
		}
		n.Log.Info("call", "method", method, "principal", who.Name, "via", who.Via.String(), "code", code.String(), "duration", time.Since(start))
	}()
	if err != nil {
		switch event := (call{method, req}).event(ctx, who, audit.End); {
		case !sandbox.HasCode(err, sandbox.CodeDenied) || who.Via == (access.Component{}):
		case who.Via.Role == access.RoleNode:
			n.auditRefused(&n.nodes, event, err)
		default:
			n.auditRefused(n.refusals.Of(who.Name, event.Time), event, err)
		}
		return err
	}
	if err := checkMessage(method, req); err != nil {
		return err
	}
	ctx, cancel := server.WithPrincipal(ctx, who)
	defer cancel()
	return n.audited(ctx, who, call{method, req}, do)
}

// large lists the methods whose messages may be larger; REST allows larger
// bodies for them, too.
var large = []string{
	nodev1.Node_ApplyTemplate_FullMethodName, nodev1.Node_FetchSnapshot_FullMethodName, nodev1.Node_ApplySecret_FullMethodName, nodev1.Node_PatchSecret_FullMethodName,
}

// checkMessage refuses messages that are too large, and fields that would be
// ignored.
func checkMessage(method string, req any) error {
	m, ok := req.(proto.Message)
	if !ok {
		return sandbox.Errorf(sandbox.CodeInternal, "%T is no message", req)
	}
	if !slices.Contains(large, method) && proto.Size(m) > server.MaxBody {
		return sandbox.Errorf(server.CodeTooLarge, "the message has more than %d bytes", server.MaxBody)
	}
	return checkFields(m.ProtoReflect())
}

// checkFields refuses unknown fields, and text with a NUL.
func checkFields(m protoreflect.Message) (err error) {
	if len(m.GetUnknown()) > 0 {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s has fields that this daemon does not know", m.Descriptor().Name()).
			Try("Send what its version of api/node/v1 has")
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
				err = errors.Join(server.CheckText(string(f.Name()), k.String()), checkValue(f.MapValue(), f, v))
				return err == nil
			})
		case f.IsList():
			for i := range v.List().Len() {
				if err = checkValue(f, f, v.List().Get(i)); err != nil {
					return false
				}
			}
		default:
			err = checkValue(f, f, v)
		}
		return err == nil
	})
	return err
}

// checkValue checks a value of a kind, in a field.
func checkValue(kind, field protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch kind.Kind() {
	case protoreflect.MessageKind:
		return checkFields(v.Message())
	case protoreflect.StringKind:
		return server.CheckText(string(field.Name()), v.String())
	case protoreflect.EnumKind:
		if kind.Enum().Values().ByNumber(v.Enum()) == nil {
			return sandbox.Invalid(string(field.Name()), "%d is none of its values", v.Enum())
		}
	}
	return nil
}
