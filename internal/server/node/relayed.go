package node

import (
	"errors"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// relayed lists the methods of guestrpc that a client may call on a stream, as
// operations. Calls of missing methods are refused, such as those that renew a sandbox,
// set its environment or end it: only the node calls these.
var relayed = map[guestrpc.Method]access.Operation{
	guestrpc.MethodExec:        "exec",
	guestrpc.MethodAttach:      "attachExec",
	guestrpc.MethodListExecs:   "listExecs",
	guestrpc.MethodSignal:      "signalExec",
	guestrpc.MethodResize:      "resizeExec",
	guestrpc.MethodReleaseExec: "releaseExec",
	guestrpc.MethodWriteStdin:  "writeStdin",

	guestrpc.MethodStat:     "statFile",
	guestrpc.MethodList:     "listFiles",
	guestrpc.MethodRead:     "readFile",
	guestrpc.MethodWrite:    "writeFile",
	guestrpc.MethodMkdir:    "makeFolder",
	guestrpc.MethodMove:     "moveFile",
	guestrpc.MethodRemove:   "removeFile",
	guestrpc.MethodSymlink:  "writeFile",
	guestrpc.MethodReadlink: "statFile",
	guestrpc.MethodChmod:    "writeFile",
	guestrpc.MethodChown:    "writeFile",
	guestrpc.MethodWatch:    "watchFiles",

	guestrpc.MethodConnect: "connectPort",

	guestrpc.MethodCodeRun:       "runCode",
	guestrpc.MethodCodeAttach:    "attachCode",
	guestrpc.MethodCodeInterrupt: "interruptCode",
	guestrpc.MethodCodeRelease:   "releaseCode",
	guestrpc.MethodCodeCreate:    "createContext",
	guestrpc.MethodCodeList:      "listContexts",
	guestrpc.MethodCodeRestart:   "restartContext",
	guestrpc.MethodCodeClose:     "deleteContext",
}

// observed returns the operation of a call as observers count it; it is empty
// for calls that they do not count.
func observed(c guestrpc.Call) sandbox.Op {
	switch r := c.Request.(type) {
	case *guestrpc.ExecRequest:
		if r.TTY {
			return sandbox.OpTerminal
		}
		return sandbox.OpExec
	case *guestrpc.CodeRunRequest:
		return sandbox.OpCode
	case *guestrpc.ConnectRequest:
		return sandbox.OpPort
	}
	return ""
}

// guestCodes translates the node's own refusals for clients of guestrpc.
var guestCodes = map[sandbox.Code]guestrpc.Code{
	sandbox.CodeInvalid:    guestrpc.CodeInvalidArgument,
	sandbox.CodeDenied:     guestrpc.CodePermissionDenied,
	sandbox.CodeNotFound:   guestrpc.CodeNotFound,
	sandbox.CodeConflict:   guestrpc.CodeFailedPrecondition,
	sandbox.CodePortClosed: guestrpc.CodeFailedPrecondition,
	sandbox.CodeCapacity:   guestrpc.CodeResourceExhausted,
	server.CodeExhausted:   guestrpc.CodeResourceExhausted,
	server.CodeTimeout:     guestrpc.CodeDeadlineExceeded,
	sandbox.CodeInternal:   guestrpc.CodeInternal,
}

// toGuest makes an error that guestrpc can carry. An error of the agent stays
// unchanged.
func toGuest(err error) error {
	var own *sandbox.Error
	if !errors.As(err, &own) {
		return err
	}
	code, known := guestCodes[own.Code]
	if !known { // the sandbox has ended, the node is full, or the daemon shuts down
		code = guestrpc.CodeUnavailable
	}
	return &guestrpc.Error{Code: code, Message: own.Error()}
}
