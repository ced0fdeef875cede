package restconv

import (
	"strconv"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

func fromVersion(version uint64) rest.ObjectVersion { return strconv.FormatUint(version, 10) }

func toVersion(r *convert.Reader, text rest.ObjectVersion) sandbox.Versioned {
	version, err := strconv.ParseUint(text, 10, 64)
	if err != nil && text != "" {
		r.Fail(sandbox.Invalid("resourceVersion", "%s is not a number", sandbox.Quote(text)))
	}
	return sandbox.Versioned{ResourceVersion: version}
}

// FromPosition formats the position of a watch: a resource version of a state
// folder.
func FromPosition(v sandbox.StateVersion) string {
	return v.ID + "-" + strconv.FormatUint(v.Version, 10)
}

// ToPosition reads the position from which a watch continues. Without the id of a state
// folder it applies to any; "" is the beginning.
func ToPosition(field, text string) (v sandbox.StateVersion, err error) {
	if text == "" {
		return v, nil
	}
	number := text
	if i := strings.LastIndexByte(text, '-'); i >= 0 {
		v.ID, number = text[:i], text[i+1:]
	}
	if v.Version, err = strconv.ParseUint(number, 10, 64); err != nil || v.Version == 0 || len(v.ID) > 32 || strings.HasPrefix(text, "-") {
		return sandbox.StateVersion{}, sandbox.Invalid(field, "%s is neither a resource version nor the id of an event", sandbox.Quote(text))
	}
	return v, nil
}
